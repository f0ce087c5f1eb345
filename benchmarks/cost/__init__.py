"""What a measured step costs beside a plain one."""
