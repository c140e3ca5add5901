/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The tests are a separate module and need their own thunks. */
#include "thunks.S"
