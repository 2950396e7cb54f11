-- A webhook was sent, or is to be tried again.
-- ARGV  1 event id  2 until the next try, ms; '' = that was all
if ARGV[2] == '' then
  R('ZREM', P .. 'hooks', ARGV[1])
  R('DEL', P .. 'hook:' .. ARGV[1])
elseif R('EXISTS', P .. 'hook:' .. ARGV[1]) == 1 then
  R('ZADD', P .. 'hooks', 'XX', int(clock() + ARGV[2]), ARGV[1])
end
return 1
