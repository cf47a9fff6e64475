//! Queue pairs as the library wants them told: the attributes of each state, and requests as a linked list.

use super::{ENOSYS, errno, gids::gid_words, ops};
use crate::verbs::{Change, Handle, ReadRequest, Refused, VerbsError, sys};
use std::{
    ffi::{c_int, c_uint},
    ptr,
};

/// Reads posted by one call.
const POSTED: usize = 64;

/// Posts requests of one kind in order.
///
/// # Safety
/// The pair is live; the memory that each request names stays mapped, and nobody else touches it, until its completion.
pub(super) unsafe fn post(pair: Handle, requests: &[ReadRequest], opcode: c_uint) -> Result<(), Refused> {
    let call = "ibv_post_send";
    let refused = |accepted, errno| Refused { accepted, error: VerbsError { call, errno } };
    let pair: *mut sys::Qp = pair.0.cast();
    // SAFETY: a live pair.
    let context = unsafe { (*pair).context };
    // SAFETY: the context of a live pair is open.
    let post = unsafe { ops(context) }.post_send.ok_or(refused(0, ENOSYS))?;
    let mut before = 0;
    for part in requests.chunks(POSTED) {
        let mut entries: Vec<sys::Sge> =
            part.iter().map(|r| sys::Sge { addr: r.to, length: r.len, lkey: r.local_key }).collect();
        let mut posted: Vec<sys::SendWr> = part.iter().map(|r| request(r, opcode)).collect();
        chain(&mut posted, &mut entries);
        let mut bad = ptr::null_mut();
        // SAFETY: a live pair; a list that ends with null, each with its one entry, all of which the call reads
        // before it returns. The caller's promise about the memory.
        let code = unsafe { post(pair, posted.as_mut_ptr(), &raw mut bad) };
        if code != 0 {
            let accepted = posted.iter().position(|wr| ptr::eq(wr, bad)).unwrap_or(0);
            let errno = if code < 0 { errno() } else { code };
            return Err(refused(before + accepted, errno));
        }
        before += part.len();
    }
    Ok(())
}

fn request(read: &ReadRequest, opcode: c_uint) -> sys::SendWr {
    sys::SendWr {
        wr_id: read.id,
        next: ptr::null_mut(),
        sg_list: ptr::null_mut(),
        num_sge: 1,
        opcode,
        send_flags: if read.signalled { sys::SEND_SIGNALED } else { 0 },
        imm_data: 0,
        remote_addr: read.from,
        rkey: read.remote_key,
        rest: [0; 9],
    }
}

/// Links each request to the next and to its own entry.
fn chain(posted: &mut [sys::SendWr], entries: &mut [sys::Sge]) {
    let mut next = ptr::null_mut();
    for (request, entry) in posted.iter_mut().zip(entries).rev() {
        request.sg_list = entry;
        request.next = next;
        next = request;
    }
}

pub(super) fn attributes(change: Change) -> (sys::QpAttr, c_int) {
    use sys::mask;
    let state = |qp_state| sys::QpAttr { qp_state, ..sys::QpAttr::default() };
    match change {
        Change::Reset => (state(sys::state::RESET), mask::STATE),
        Change::Fail => (state(sys::state::ERR), mask::STATE),
        Change::Init { port } => {
            let access = sys::ACCESS_REMOTE_READ as c_uint;
            let attr = sys::QpAttr { port_num: port, qp_access_flags: access, ..state(sys::state::INIT) };
            (attr, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS)
        }
        Change::Receive(path) => {
            let attr = sys::QpAttr {
                path_mtu: path.mtu,
                dest_qp_num: path.number,
                rq_psn: path.psn,
                max_dest_rd_atomic: path.reads_in,
                min_rnr_timer: 12,
                ah_attr: sys::AhAttr {
                    dgid: gid_words(path.gid),
                    flow_label: 0,
                    sgid_index: path.own_gid,
                    hop_limit: 64,
                    traffic_class: path.traffic_class,
                    dlid: path.lid,
                    sl: path.service_level,
                    src_path_bits: 0,
                    static_rate: 0,
                    is_global: u8::from(path.global),
                    port_num: path.port,
                },
                ..state(sys::state::RTR)
            };
            let mask = mask::STATE
                | mask::AV
                | mask::PATH_MTU
                | mask::DEST_QPN
                | mask::RQ_PSN
                | mask::MAX_DEST_RD_ATOMIC
                | mask::MIN_RNR_TIMER;
            (attr, mask)
        }
        Change::Send { psn, reads, timeout, retries } => {
            let attr = sys::QpAttr {
                sq_psn: psn,
                max_rd_atomic: reads,
                timeout,
                retry_cnt: retries,
                // Nobody sends to us: a peer is never "not ready".
                rnr_retry: 0,
                ..state(sys::state::RTS)
            };
            let mask = mask::STATE
                | mask::TIMEOUT
                | mask::RETRY_CNT
                | mask::RNR_RETRY
                | mask::SQ_PSN
                | mask::MAX_QP_RD_ATOMIC;
            (attr, mask)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Completions, Device, Library, Pair, Path, Region, Status, Verbs};
    use std::sync::Arc;

    #[test]
    fn requests_are_linked_in_order_each_to_its_entry() {
        let read =
            |id| ReadRequest { id, from: 1, remote_key: 2, to: 3, len: 4, local_key: 5, signalled: id == 2 };
        let mut posted: Vec<_> = [0, 1, 2].map(|id| request(&read(id), sys::WR_RDMA_READ)).into();
        let mut entries = vec![sys::Sge { addr: 3, length: 4, lkey: 5 }; 3];
        chain(&mut posted, &mut entries);
        let at: Vec<_> = posted.iter().map(ptr::from_ref).collect();
        assert_eq!(posted[0].next.cast_const(), at[1]);
        assert_eq!(posted[1].next.cast_const(), at[2]);
        assert!(posted[2].next.is_null());
        assert_eq!(posted[1].sg_list.cast_const(), &raw const entries[1]);
        assert_eq!(posted.iter().map(|wr| wr.send_flags).collect::<Vec<_>>(), [0, 0, sys::SEND_SIGNALED]);
    }

    /// What a reader could try that does not keep to READs: its key lets the NIC read, and nothing else.
    #[test]
    #[ignore = "needs a verbs provider: cargo xtask rdma-vm runs it"]
    fn a_reader_s_key_does_not_write() {
        const WRITE: c_uint = 0;
        let verbs: Arc<dyn Verbs> = Library::shared().unwrap();
        let device = Device::open(&verbs, "rxe0").unwrap();
        let port = device.port(1).unwrap();
        let gid = device.gids(1, port.gids).unwrap().into_iter().find(|gid| gid.index == 1).unwrap();
        let completions = Completions::new(&device, 16).unwrap();
        let [source, reader] = [(); 2].map(|()| Pair::new(&completions, 4).unwrap());
        for (own, other) in [(&source, &reader), (&reader, &source)] {
            let path = Path {
                port: 1,
                own_gid: 1,
                gid: gid.bytes,
                global: true,
                lid: 0,
                number: other.number(),
                psn: 1,
                mtu: port.mtu,
                traffic_class: 0,
                service_level: 0,
                reads_in: 1,
            };
            own.init(1).unwrap();
            own.receive(path).unwrap();
            own.send(1, 1, 14, 6).unwrap();
        }
        let (theirs, mine) = (vec![7u8; 4096], vec![1u8; 4096]);
        let at = |bytes: &Vec<u8>| bytes.as_ptr().expose_provenance() as u64;
        // SAFETY: both vectors outlive their regions and requests, and are not touched while one is under way.
        let [exported, own] =
            [&theirs, &mine].map(|v| unsafe { Region::of_address(&device, at(v), 4096) }.unwrap());
        let request = ReadRequest {
            id: 1,
            from: at(&theirs),
            remote_key: exported.remote_key(),
            to: at(&mine),
            len: 4096,
            local_key: own.local_key(),
            signalled: true,
        };
        let run = |opcode| {
            // SAFETY: as above.
            unsafe { post(reader.handle, &[request], opcode) }.unwrap();
            let (mut found, began) = (Vec::new(), std::time::Instant::now());
            while found.is_empty() && began.elapsed().as_secs() < 5 {
                completions.poll(&mut found).unwrap();
            }
            found[0].status
        };
        assert_eq!(run(sys::WR_RDMA_READ), Status::SUCCESS);
        assert!(mine.iter().all(|byte| *byte == 7), "the READ came");
        // By the queue pair (soft-RoCE) or by the key: neither allows it.
        assert!(matches!(run(WRITE), Status::REMOTE_INVALID | Status::REMOTE_ACCESS));
        assert!(theirs.iter().all(|byte| *byte == 7), "the source is as it was");
    }
}
