"""How ranks are started, meet, are watched and stopped. Imports neither engine nor train."""
