-- A lane is over: the id leaves what its worker runs, unless another attempt is there by now.
-- ARGV  1 worker  2 id  3 a
if R('HGET', P .. 'lanes:' .. ARGV[1], ARGV[2]) == ARGV[3] then R('HDEL', P .. 'lanes:' .. ARGV[1], ARGV[2]) end
return 1
