-- Keeps the result of a request that has ended, so that nobody else has to. Also in a full store: it stands for the log,
-- which goes earlier then.
-- ARGV  1 id  2 how long it is kept, s  3 on: fields and values of RQ's result
local results = 'rq:results:' .. ARGV[1]
R('XADD', results, 'MAXLEN', 10, '*', unpack(ARGV, 3))
R('EXPIRE', results, ARGV[2])
R('ZREM', P .. 'unkept', ARGV[1])
return 1
