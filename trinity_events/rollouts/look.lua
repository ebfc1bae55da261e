-- Returns the seconds that the server has been up and the ids of all requests; and, if the group can give
-- requests to explorers, the claims (id, member, milliseconds idle, deliveries), and the ids of requests that
-- were delivered and have no claim, which the group gives to no explorer any more.
-- Our scripts acknowledge a request and delete it at once. But rules of access let explorers acknowledge alone,
-- read without claims, and set the position of the group (XCLAIM with LASTID). A group past the newest request would
-- deliver none, and counts as gone. Claims are looked up by request: claims of deleted requests may be any number.
-- KEYS: rollouts   ARGV: group
local function is_above(a, b) -- ids whose parts are small, but for the one that a writer chose
  local am, an = a:match('^(%d+)-(%d+)$')
  local bm, bn = b:match('^(%d+)-(%d+)$')
  am, an, bm, bn = tonumber(am), tonumber(an), tonumber(bm), tonumber(bn)
  return am > bm or (am == bm and an > bn)
end
local function fields_of(list)
  local fields = {}
  for i = 1, #list, 2 do fields[list[i]] = list[i + 1] end
  return fields
end
local up = tonumber(redis.call('INFO', 'server'):match('uptime_in_seconds:(%d+)'))
local ids = {}
for number, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do ids[number] = entry[1] end
if redis.call('EXISTS', KEYS[1]) == 0 then return {up, ids} end
local delivered
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local fields = fields_of(group)
  if fields['name'] == ARGV[1] then delivered = fields['last-delivered-id'] end
end
local newest = fields_of(redis.call('XINFO', 'STREAM', KEYS[1]))['last-generated-id']
if not delivered or is_above(delivered, newest) then return {up, ids} end
local claims, unclaimable = {}, {}
for _, id in ipairs(ids) do
  local claim = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  if claim then
    claims[#claims + 1] = claim
  elseif not is_above(id, delivered) then
    unclaimable[#unclaimable + 1] = id
  end
end
return {up, ids, claims, unclaimable}
