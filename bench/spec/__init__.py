"""`fathom bench spec`: what speculative decoding gains, by the number of requests at once."""
