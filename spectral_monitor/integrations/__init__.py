"""The monitor in other packages' training loops; each module needs the package it is named after."""
