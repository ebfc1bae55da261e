-- Trims a stream below a limit, but keeps entries that a group has not received or acknowledged.
-- With a token, trims only for the newest leader: a former leader knows of no newer group.
-- KEYS: stream, fence   ARGV: limit (the first id to keep), token or ''
if ARGV[2] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
--include helpers
local limit = ARGV[1]
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local fields = named(group)
  local needed = fields['last-delivered-id']
  local pending = redis.call('XPENDING', KEYS[1], fields['name'])
  if pending[1] > 0 and below(pending[2], needed) then needed = pending[2] end
  if below(needed, limit) then limit = needed end
end
return redis.call('XTRIM', KEYS[1], 'MINID', limit)
