"""The trainer's side of the sandbox: broker, fork servers, pool, and the link to them."""
