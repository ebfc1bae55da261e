-- Returns the seconds that the server has been up, the ids of all requests, and the claims (id,
-- member, milliseconds idle, deliveries), or no claims if the group is gone.
-- KEYS: rollouts   ARGV: group, maximum number of claims
local up = redis.call('INFO', 'server'):match('uptime_in_seconds:(%d+)')
local ids = {}
for number, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do ids[number] = entry[1] end
local claims = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[2])
if claims.err then return {tonumber(up), ids} end
return {tonumber(up), ids, claims}
