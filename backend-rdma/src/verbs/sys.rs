//! The structures of `infiniband/verbs.h` that we hand over or read, as this platform's C compiler lays them out.
//!
//! They are the library's ABI, the same since its first release; x86_64 and aarch64 lay them out alike. What we never
//! look at stands as bytes. `tests` compares every size and offset with a C compiler's where the headers are there.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A pointer to something of the library's that we never look into.
pub(crate) type Opaque = *mut c_void;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) guids: [u64; 2],
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor: [u32; 3],
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    /// Reads that one queue pair may have coming in.
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    /// Reads that one queue pair may have going out.
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) rest: [u32; 16],
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
    pub(crate) tail: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) counters: [u32; 2],
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) bytes: [u8; 8],
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GidEntry {
    pub(crate) gid: [u64; 2],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// The visible part of a memory region.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mr {
    pub(crate) context: Opaque,
    pub(crate) pd: Opaque,
    pub(crate) addr: Opaque,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct CompChannel {
    pub(crate) context: Opaque,
    pub(crate) fd: c_int,
    pub(crate) refcnt: c_int,
}

/// The front of a completion queue: all that is read of it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
}

/// The front of a queue pair.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    pub(crate) qp_context: Opaque,
    pub(crate) pd: Opaque,
    pub(crate) send_cq: Opaque,
    pub(crate) recv_cq: Opaque,
    pub(crate) srq: Opaque,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: Opaque,
    pub(crate) send_cq: Opaque,
    pub(crate) recv_cq: Opaque,
    pub(crate) srq: Opaque,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) dgid: [u64; 2],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// A send request, as far as an RDMA READ fills it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) rest: [u64; 9],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AsyncEvent {
    pub(crate) element: u64,
    pub(crate) event_type: c_uint,
}

pub(crate) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;

/// The table of calls that do not go through the library's symbols.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ContextOps {
    pub(crate) before_poll: [Opaque; 11],
    pub(crate) poll_cq: Option<PollCq>,
    pub(crate) req_notify_cq: Option<ReqNotifyCq>,
    pub(crate) before_post: [Opaque; 12],
    pub(crate) post_send: Option<PostSend>,
    pub(crate) rest: [Opaque; 6],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: Opaque,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
}

pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_READ: c_int = 1 << 2;
pub(crate) const QPT_RC: c_uint = 2;
pub(crate) const WR_RDMA_READ: c_uint = 4;
pub(crate) const SEND_SIGNALED: c_uint = 1 << 1;

pub(crate) mod state {
    use std::ffi::c_uint;
    pub(crate) const RESET: c_uint = 0;
    pub(crate) const INIT: c_uint = 1;
    pub(crate) const RTR: c_uint = 2;
    pub(crate) const RTS: c_uint = 3;
    pub(crate) const ERR: c_uint = 6;
}

pub(crate) mod mask {
    use std::ffi::c_int;
    pub(crate) const STATE: c_int = 1;
    pub(crate) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fmt::Write as _,
        mem::{offset_of, size_of},
        path::PathBuf,
        process::Command,
    };

    type Layout = (&'static str, Option<usize>, Vec<(&'static str, usize)>);

    /// Every structure by its name in C, with its size, or `None` where we hold its front only, and our fields.
    fn ours() -> Vec<Layout> {
        macro_rules! layout {
            ($c:literal, $t:ty, $size:expr, $($field:ident = $name:literal),*) => {
                ($c, $size, vec![$(($name, offset_of!($t, $field))),*])
            };
        }
        vec![
            layout!(
                "ibv_device_attr",
                DeviceAttr,
                Some(size_of::<DeviceAttr>()),
                max_mr_size = "max_mr_size",
                max_qp = "max_qp",
                max_qp_wr = "max_qp_wr",
                max_cqe = "max_cqe",
                max_qp_rd_atom = "max_qp_rd_atom",
                max_qp_init_rd_atom = "max_qp_init_rd_atom",
                phys_port_cnt = "phys_port_cnt"
            ),
            layout!(
                "ibv_port_attr",
                PortAttr,
                Some(size_of::<PortAttr>()),
                state = "state",
                active_mtu = "active_mtu",
                gid_tbl_len = "gid_tbl_len",
                max_msg_sz = "max_msg_sz",
                lid = "lid",
                link_layer = "link_layer"
            ),
            layout!(
                "ibv_gid_entry",
                GidEntry,
                Some(size_of::<GidEntry>()),
                gid_index = "gid_index",
                gid_type = "gid_type"
            ),
            layout!(
                "ibv_wc",
                Wc,
                Some(size_of::<Wc>()),
                status = "status",
                vendor_err = "vendor_err",
                qp_num = "qp_num",
                wc_flags = "wc_flags",
                pkey_index = "pkey_index"
            ),
            layout!("ibv_mr", Mr, Some(size_of::<Mr>()), lkey = "lkey", rkey = "rkey"),
            layout!("ibv_comp_channel", CompChannel, Some(size_of::<CompChannel>()), fd = "fd"),
            layout!("ibv_cq", Cq, None, context = "context"),
            layout!("ibv_qp", Qp, None, context = "context", qp_num = "qp_num"),
            layout!(
                "ibv_qp_init_attr",
                QpInitAttr,
                Some(size_of::<QpInitAttr>()),
                cap = "cap",
                qp_type = "qp_type",
                sq_sig_all = "sq_sig_all"
            ),
            layout!(
                "ibv_ah_attr",
                AhAttr,
                Some(size_of::<AhAttr>()),
                sgid_index = "grh.sgid_index",
                traffic_class = "grh.traffic_class",
                dlid = "dlid",
                sl = "sl",
                is_global = "is_global",
                port_num = "port_num"
            ),
            layout!(
                "ibv_qp_attr",
                QpAttr,
                Some(size_of::<QpAttr>()),
                path_mtu = "path_mtu",
                rq_psn = "rq_psn",
                dest_qp_num = "dest_qp_num",
                qp_access_flags = "qp_access_flags",
                ah_attr = "ah_attr",
                pkey_index = "pkey_index",
                max_rd_atomic = "max_rd_atomic",
                timeout = "timeout",
                rnr_retry = "rnr_retry",
                rate_limit = "rate_limit"
            ),
            layout!("ibv_sge", Sge, Some(size_of::<Sge>()), length = "length", lkey = "lkey"),
            layout!(
                "ibv_send_wr",
                SendWr,
                Some(size_of::<SendWr>()),
                opcode = "opcode",
                send_flags = "send_flags",
                remote_addr = "wr.rdma.remote_addr",
                rkey = "wr.rdma.rkey"
            ),
            layout!("ibv_async_event", AsyncEvent, Some(size_of::<AsyncEvent>()), event_type = "event_type"),
            layout!(
                "ibv_context_ops",
                ContextOps,
                Some(size_of::<ContextOps>()),
                poll_cq = "poll_cq",
                req_notify_cq = "req_notify_cq",
                post_send = "post_send"
            ),
            layout!("ibv_context", Context, None, ops = "ops", cmd_fd = "cmd_fd", async_fd = "async_fd"),
        ]
    }

    /// As a C compiler gave them for x86_64 and `rdma-core` 44, one `NAME[.FIELD] NUMBER` a line.
    const COMPILED: &str = include_str!("layout.txt");

    fn text() -> String {
        let mut text = String::new();
        for (name, size, fields) in ours() {
            if let Some(size) = size {
                let _ = writeln!(text, "{name} {size}");
            }
            for (field, offset) in fields {
                let _ = writeln!(text, "{name}.{field} {offset}");
            }
        }
        text
    }

    #[test]
    fn every_structure_is_laid_out_as_recorded() {
        assert_eq!(text(), COMPILED);
    }

    /// `FLASHBOOT_CONFORMANCE_HEADERS` is the folder that holds `infiniband/verbs.h`.
    #[test]
    #[ignore = "needs the headers of libibverbs: cargo xtask rdma-vm runs it"]
    fn every_structure_is_laid_out_as_the_headers_say() {
        let headers =
            std::env::var_os("FLASHBOOT_CONFORMANCE_HEADERS").map_or("/usr/include".into(), PathBuf::from);
        let mut program =
            String::from("#include <infiniband/verbs.h>\n#include <stdio.h>\n#include <stddef.h>\n");
        program.push_str("int main(void) {\n");
        for (name, size, fields) in ours() {
            if size.is_some() {
                let _ = writeln!(program, "printf(\"{name} %zu\\n\", sizeof(struct {name}));");
            }
            for (field, _) in fields {
                let _ =
                    writeln!(program, "printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {field}));");
            }
        }
        program.push_str("}\n");
        let folder = tempfile::tempdir().unwrap();
        let (source, probe) = (folder.path().join("probe.c"), folder.path().join("probe"));
        std::fs::write(&source, program).unwrap();
        let compiled =
            Command::new("cc").arg("-I").arg(&headers).arg(&source).arg("-o").arg(&probe).status().unwrap();
        assert!(compiled.success());
        let said = Command::new(probe).output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap(), text());
    }
}
