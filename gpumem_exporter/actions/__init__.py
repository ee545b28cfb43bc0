"""Actions on processes: requests, their delivery to reporters, their results, and policies that request them."""
