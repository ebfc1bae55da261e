-- Writes the samples of answers, each of which acknowledges its request and deletes it; or does nothing
-- for a request that was answered, replaced or withdrawn before. Returns for each 1 if it counts.
-- KEYS: epoch, rollouts, experiences
-- ARGV: epoch, group, then for each: id of the request, number of samples, field (e, or r if they are
--   references to payloads), samples
--include fence
--include takes_entries
local function is_claimed(id)
  local claim = redis.pcall('XPENDING', KEYS[2], ARGV[2], id, id, 1)
  return not claim.err and #claim == 1
end
local counted = {}
local at = 3
while at < #ARGV do
  local id, samples = ARGV[at], tonumber(ARGV[at + 1])
  local counts = is_claimed(id) and 1 or 0
  if counts == 1 then
    -- The samples first: a server without memory refuses a script only before its first write.
    for i = at + 3, at + 2 + samples do redis.call('XADD', KEYS[3], '*', ARGV[at + 2], ARGV[i]) end
    redis.call('XACK', KEYS[2], ARGV[2], id)
    redis.call('XDEL', KEYS[2], id)
  end
  counted[#counted + 1] = counts
  at = at + 3 + samples
end
return counted
