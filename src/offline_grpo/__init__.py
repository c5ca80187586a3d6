import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; it warns about kernels that are not used
