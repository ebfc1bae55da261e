-- Takes the epoch that the caller wrote into its event, unless it is taken.
-- KEYS: epoch, events   ARGV: epoch to take, payload
local present = tonumber(redis.call('GET', KEYS[1]) or '0')
if present + 1 ~= tonumber(ARGV[1]) then return present end
redis.call('XADD', KEYS[2], '*', 'e', ARGV[2]) -- before the epoch: the stream may be full
redis.call('INCR', KEYS[1])
return -1
