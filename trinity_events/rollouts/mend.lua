-- Deletes the stream of answers if its largest id ever is still the given one, which a writer chose: the
-- server counts on from it, and takes no entry after the largest of all. Returns 1 if no stream
-- with such an id is there afterwards.
-- KEYS: epoch, experiences   ARGV: epoch, largest id
--include fence
if redis.call('EXISTS', KEYS[2]) == 0 then return 1 end
local info = redis.call('XINFO', 'STREAM', KEYS[2])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' and info[i + 1] ~= ARGV[2] then return 0 end
end
redis.call('DEL', KEYS[2])
return 1
