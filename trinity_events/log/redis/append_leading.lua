-- Appends an event of the leader, unless another reducer leads by now.
-- KEYS: events, fence   ARGV: token, payload
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return false end
return redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
