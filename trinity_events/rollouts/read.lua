-- Returns entries of the answers after an id, each as {id, field, value, ...} with the fields that are
-- known. At least one, if there is any, and further ones within the limits of number and bytes. An entry
-- above the limit of its bytes has its number of bytes as its only field: its content is not sent.
-- KEYS: experiences   ARGV: id, maximum entries, maximum bytes, maximum bytes of an entry
local KNOWN = {
  e = true, r = true, failed = true, reason = true, explorer = true, error = true,
  dependency = true, unreachable = true
}
local rows, bytes, after = {}, 0, ARGV[1]
for _ = 1, tonumber(ARGV[2]) do
  local entry = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 1)[1]
  if not entry then break end
  local row, size = {entry[1]}, 0
  for i = 1, #entry[2], 2 do
    local name, value = entry[2][i], entry[2][i + 1]
    size = size + #name + #value
    if KNOWN[name] and #row < 13 then -- a failed request has six fields
      row[#row + 1] = name
      row[#row + 1] = value
    end
  end
  if size > tonumber(ARGV[4]) then row = {entry[1], 'large', tostring(size)} end
  for i = 2, #row do bytes = bytes + #row[i] end
  if bytes > tonumber(ARGV[3]) and #rows > 0 then break end
  rows[#rows + 1] = row
  after = entry[1]
  if after == '18446744073709551615-18446744073709551615' then break end -- none can follow
end
return rows
