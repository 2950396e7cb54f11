-- A process goes away in good order: its name, lease and figures with it. What it still has, as the store did not answer
-- when it was to be given back or booked out, goes back for whoever takes it next; no kill is counted. What an API process
-- still follows, as the store did not hear that it let go, ends if nobody else follows it.
-- ARGV  1 'worker' or 'proc'  2 name  3 cancelled frame, for an API process
local function give_up(id, a)
  local j = named(id, 'a', 'owner', 'terminal', 'status', 'model', 'fp', 'class', 'origin', 'exec')
  if not j.terminal and j.a == a and j.owner == ARGV[2] and j.status == 'started' then
    give_back(id, j, ARGV[2])
    tally('handovers', known(j.model), 1)
  end
end

if ARGV[1] == 'worker' then
  local lanes = R('HGETALL', P .. 'lanes:' .. ARGV[2])
  for i = #lanes - 1, 1, -2 do
    pcall(give_up, lanes[i], lanes[i + 1]) -- something else may lie where its keys belong
  end
  R('DEL', P .. 'lanes:' .. ARGV[2])
  forget_worker(ARGV[2])
else
  R('SREM', P .. 'procs', ARGV[2])
  for _, id in ipairs(R('SMEMBERS', P .. 'att:' .. ARGV[2])) do pcall(let_go, id, ARGV[2], ARGV[3]) end
  R('DEL', P .. 'alive:' .. ARGV[2], P .. 'att:' .. ARGV[2])
end
return 1
