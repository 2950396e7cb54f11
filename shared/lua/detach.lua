-- An API process no longer follows a request. If none does and it is not a background one, it is cancelled.
-- ARGV  1 id  2 proc  3 cancelled frame
-- Returns 'cancelled', 'ended', 'followed', 'background' or 'missing'
return let_go(ARGV[1], ARGV[2], ARGV[3])
