"""Copies of each rank's state in the host memory of another rank's process.

After the loss of a rank, the processes that stay hand the copies over, and training continues from
them instead of the newest checkpoint. Only warm restarts have processes that stay.
"""
