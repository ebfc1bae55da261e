-- Gives new ids, in order, to entries with ids past year 9999; all other ids stay.
-- A stream continues from its largest id ever, even if that entry was removed. The script
-- therefore writes the stream anew, with its groups and their pending entries.
-- KEYS: stream, temporary stream, fence (if there is a leader)
-- ARGV: the first id past year 9999, position up to which ids stay, token or ''
if KEYS[3] and redis.call('GET', KEYS[3]) ~= ARGV[3] then return -1 end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local PAGE = 500
local MOST_FIELDS = 200 -- our entries have one; a call takes some thousands of arguments
--include helpers
local limit = ARGV[1]
local info = named(redis.call('XINFO', 'STREAM', KEYS[1]))
if below(info['last-generated-id'], limit) or not below(ARGV[2], limit) then return 0 end
redis.call('DEL', KEYS[2])

local function each_page(first, last, visit)
  while true do
    local page = redis.call('XRANGE', KEYS[1], first, last, 'COUNT', PAGE)
    for _, entry in ipairs(page) do
      local fields = entry[2]
      if #fields > MOST_FIELDS then fields = {fields[1], fields[2]} end
      visit(entry[1], fields)
    end
    if #page < PAGE then return end
    first = '(' .. page[#page][1]
    if page[#page][1] == '18446744073709551615-18446744073709551615' then return end
  end
end

local last, late = ARGV[2], {}
each_page('-', '(' .. limit, function(id, fields)
  redis.call('XADD', KEYS[2], id, unpack(fields))
  if below(last, id) then last = id end
end)
each_page(limit, '+', function(_, fields) late[#late + 1] = fields end)

if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[2], '-', '0', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', KEYS[2], '-')
end
if last == '0-0' then last = '0-1' end
local deleted = info['max-deleted-entry-id']
if below(last, deleted) then deleted = '0-0' end
redis.call('XSETID', KEYS[2], last,
  'ENTRIESADDED', info['entries-added'] - #late, 'MAXDELETEDID', deleted)

for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(fields)
  local name, reached = group['name'], group['last-delivered-id']
  if below(last, reached) then reached = last end
  redis.call('XGROUP', 'CREATE', KEYS[2], name, reached)
  for _, member in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], name)) do
    redis.call('XGROUP', 'CREATECONSUMER', KEYS[2], name, named(member)['name'])
  end
  local first = '-'
  while true do
    local page = redis.call('XPENDING', KEYS[1], name, first, '(' .. limit, PAGE)
    for _, one in ipairs(page) do
      redis.call('XCLAIM', KEYS[2], name, one[2], 0, one[1],
        'IDLE', one[3], 'RETRYCOUNT', one[4], 'FORCE', 'JUSTID')
    end
    if #page < PAGE then break end
    first = '(' .. page[#page][1]
  end
end

for _, fields in ipairs(late) do redis.call('XADD', KEYS[2], '*', unpack(fields)) end
redis.call('RENAME', KEYS[2], KEYS[1])
return #late
