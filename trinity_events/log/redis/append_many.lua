-- Appends events, or reports, in their order, all or none. A server that becomes full or read-only between
-- two separate calls would take a later event without the one before.
-- KEYS: events or reports   ARGV: payloads
local ids = {}
for i = 1, #ARGV do ids[i] = redis.call('XADD', KEYS[1], '*', 'e', ARGV[i]) end
return ids
