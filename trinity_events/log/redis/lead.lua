-- Takes the lead if it is free. The fence is a counter that outlives every lease: a write of a
-- former leader carries a smaller token and is refused.
-- KEYS: leader, fence   ARGV: lease in milliseconds
local left = redis.call('PTTL', KEYS[1])
if left > tonumber(ARGV[1]) then -- the server's clock was set back: cap the lease
  left = tonumber(ARGV[1])
  redis.call('PEXPIRE', KEYS[1], left)
end
if left > 0 then return {0, left} end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], token, 'PX', ARGV[1])
return {token, tonumber(ARGV[1])}
