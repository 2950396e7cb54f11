-- Ends a request, once. The owner names its attempt and its last frame; '' for both = whoever (cancel, API, reaper).
-- ARGV  1 id  2 a or ''  3 s or ''  4 by  5 terminal frame  6 RQ status
-- Returns {1, a of the end} won; {0, by} somebody was first; {-1} no such job; {-2, a} another attempt owns it;
--         {-3, top s} the log is shorter than what the owner wrote
local id = ARGV[1]
local j = job(id, 'a', 'terminal', 'status')
if not j[3] then
  if ARGV[2] ~= '' then R('DEL', P .. 'log:' .. id) end -- nobody can read it by an id that is unknown
  return { -1 }
end
if j[2] then return { 0, j[2] } end
if ARGV[2] ~= '' and ARGV[2] ~= (j[1] or '0') then return { -2, j[1] or '0' } end
if ARGV[3] ~= '' then
  local _, s = top(id)
  if s < tonumber(ARGV[3]) then return { -3, s } end
end
return { 1, finish(id, ARGV[5], ARGV[4], ARGV[6]) }
