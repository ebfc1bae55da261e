-- Functions that other scripts include; it is no script by itself.
-- named: the fields of a reply by their names. below: true if one entry id is below another.
-- is_exhausted: true if a writer gave a stream an id past year 9999, after which it may take no entry.
local function named(list)
  local fields = {}
  for i = 1, #list, 2 do fields[list[i]] = list[i + 1] end
  return fields
end
local function below(a, b) -- compares as text: Lua numbers have fewer digits than ids
  local am, an = a:match('^(%d+)-(%d+)$')
  local bm, bn = b:match('^(%d+)-(%d+)$')
  if am == bm then am, bm = an, bn end
  if #am ~= #bm then return #am < #bm end
  return am < bm
end
local function is_exhausted(key)
  if redis.call('EXISTS', key) == 0 then return false end
  local newest = named(redis.call('XINFO', 'STREAM', key))['last-generated-id']
  return not below(newest, '253402300800000-0')
end
