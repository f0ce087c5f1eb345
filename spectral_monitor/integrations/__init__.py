"""Callbacks for other packages' training loops; each module needs the package that it is named after."""
