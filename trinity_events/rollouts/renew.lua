-- Extends the claims that a member still holds by one lease; returns their ids.
-- KEYS: epoch, rollouts   ARGV: epoch, group, member, ids of requests
--include fence
local held = {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local claim = redis.pcall('XPENDING', KEYS[2], ARGV[2], id, id, 1, ARGV[3])
  if claim.err then return {} end -- the stream is gone, and every claim with it
  if #claim == 1 then
    redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, id, 'JUSTID')
    held[#held + 1] = id
  end
end
return held
