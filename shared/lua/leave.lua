-- A process goes away in good order: its name, lease and figures with it. Its lanes are empty by then.
-- ARGV  1 'worker' or 'proc'  2 name
if ARGV[1] == 'worker' then
  R('SREM', P .. 'workers', ARGV[2])
  R('DEL', P .. 'lease:' .. ARGV[2], P .. 'stat:' .. ARGV[2])
  for _, key in ipairs(R('SMEMBERS', 'rq:queues')) do -- RQ takes it off its own queue only
    R('SREM', 'rq:workers:' .. string.sub(key, #'rq:queue:' + 1), 'rq:worker:' .. ARGV[2])
  end
else
  R('SREM', P .. 'procs', ARGV[2])
  R('DEL', P .. 'alive:' .. ARGV[2])
end
return 1
