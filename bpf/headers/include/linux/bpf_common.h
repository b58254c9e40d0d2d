/* SPDX-License-Identifier: GPL-2.0 */
/* Empty on purpose: included by the prelude of BCC, of no use to programs that read no kernel structs. */
