-- Trims a stream below a limit, but never what a group has not acknowledged or not been given.
-- KEYS: stream   ARGV: limit, an id; entries below it may go
local function number(id)
  local ms, n = id:match('^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(n)
end
local function below(a, b)
  local am, an = number(a)
  local bm, bn = number(b)
  return am < bm or (am == bm and an < bn)
end
local limit = ARGV[1]
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local fields = {}
  for i = 1, #group, 2 do fields[group[i]] = group[i + 1] end
  local needed = fields['last-delivered-id']
  local pending = redis.call('XPENDING', KEYS[1], fields['name'])
  if pending[1] > 0 and below(pending[2], needed) then needed = pending[2] end
  if below(needed, limit) then limit = needed end
end
return redis.call('XTRIM', KEYS[1], 'MINID', limit)
