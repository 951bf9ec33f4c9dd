"""A recipe elsewhere: started by other people's schedulers, written as other systems' configurations, and read from them."""
