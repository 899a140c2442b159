"""Programs that repeat: what is known of a round of one guides the next, as advice that may be wrong."""
