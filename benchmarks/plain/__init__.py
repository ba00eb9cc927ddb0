"""Arithmetic written out plainly, the way the papers' modules compute it: what the library is compared with."""
