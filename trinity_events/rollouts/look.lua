-- Returns the number of requests in the stream, and the claims: id, member, milliseconds idle,
-- deliveries. Without the epoch's group it returns only the number.
-- KEYS: rollouts   ARGV: group, maximum number of claims
local count = redis.call('XLEN', KEYS[1])
local claims = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[2])
if claims.err then return {count} end
return {count, claims}
