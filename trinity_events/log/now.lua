-- The clock of the server that the run is on. KEYS: any of the run's, to find it in a cluster
local time = redis.call('TIME')
return time[1] * 1000 + math.floor(time[2] / 1000)
