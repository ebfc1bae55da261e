-- Takes or extends a lease on a checkpoint, unless the checkpoint is being deleted.
-- KEYS: holds, doomed   ARGV: step, lease holder, milliseconds
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1] .. ' ' .. ARGV[2])
return 1
