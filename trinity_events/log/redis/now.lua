-- Returns the clock of the run's server. KEYS: any key of the run, to find its cluster node
local time = redis.call('TIME')
return time[1] * 1000 + math.floor(time[2] / 1000)
