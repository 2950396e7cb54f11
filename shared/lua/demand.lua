-- What a model has to do and who does it, for whoever starts and ends its workers.
-- ARGV  1 model
-- Returns {requests that wait; ms until these will have been taken, -1 = not known; {worker, its lanes, those in use or not
--         booked out yet, ...} of the live workers that do not drain}
local model, speed = ARGV[1], rate(ARGV[1])
local count, workers = waiting(model, 'interactive') + waiting(model, 'batch'), {}
for _, worker in ipairs(live_workers(model)) do
  workers[#workers + 1] = worker[3]
  workers[#workers + 1] = worker[1]
  workers[#workers + 1] = math.max(worker[1] - worker[2], R('HLEN', P .. 'lanes:' .. worker[3]))
end
return { count, speed and int(math.min(count / speed, ATTEMPTS)) or '-1', workers }
