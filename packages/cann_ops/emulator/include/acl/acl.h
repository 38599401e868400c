// Names of the runtime that host wrappers mention.
#pragma once

typedef int aclError;
#define ACL_SUCCESS 0
