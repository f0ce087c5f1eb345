"""References other than the network itself: profiles of tuned runs, of the same network or a narrower one."""
