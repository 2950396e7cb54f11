"""Interface only for now; see git history."""
