-- Included by scripts; it is no script by itself. Refuses a caller of another epoch than the run's.
-- KEYS[1]: epoch   ARGV[1]: epoch of the caller
local present = redis.call('GET', KEYS[1]) or '0'
if present ~= ARGV[1] then return {err = 'STALEEPOCH ' .. present} end
