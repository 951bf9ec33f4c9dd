"""Rates of devices, links and disks: measured, judged and written to a profile."""
