//! Completion statuses and MTUs, by number and by name.

use std::fmt;

/// `ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

impl Status {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const LOCAL_PROTECTION: Self = Self(4);
    pub(crate) const FLUSHED: Self = Self(5);
    pub(crate) const REMOTE_INVALID: Self = Self(9);
    pub(crate) const REMOTE_ACCESS: Self = Self(10);
    pub(crate) const REMOTE_OPERATION: Self = Self(11);
    pub(crate) const RETRY_EXCEEDED: Self = Self(12);
    pub(crate) const RNR_RETRY_EXCEEDED: Self = Self(13);
    pub(crate) const RESPONSE_TIMEOUT: Self = Self(20);

    /// The name in the headers, without its prefix.
    pub(crate) fn name(self) -> &'static str {
        const NAMES: [&str; 24] = [
            "SUCCESS",
            "LOC_LEN_ERR",
            "LOC_QP_OP_ERR",
            "LOC_EEC_OP_ERR",
            "LOC_PROT_ERR",
            "WR_FLUSH_ERR",
            "MW_BIND_ERR",
            "BAD_RESP_ERR",
            "LOC_ACCESS_ERR",
            "REM_INV_REQ_ERR",
            "REM_ACCESS_ERR",
            "REM_OP_ERR",
            "RETRY_EXC_ERR",
            "RNR_RETRY_EXC_ERR",
            "LOC_RDD_VIOL_ERR",
            "REM_INV_RD_REQ_ERR",
            "REM_ABORT_ERR",
            "INV_EECN_ERR",
            "INV_EEC_STATE_ERR",
            "FATAL_ERR",
            "RESP_TIMEOUT_ERR",
            "GENERAL_ERR",
            "TM_ERR",
            "TM_RNDV_INCOMPLETE",
        ];
        NAMES.get(self.0 as usize).copied().unwrap_or("a status of a newer library")
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of an `ibv_mtu`; `None` for a number that is none.
pub(crate) fn mtu_bytes(code: u32) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

/// The `ibv_mtu` of that many bytes, which must be one of 256, 512, 1024, 2048 and 4096.
pub(crate) fn mtu_code(bytes: u32) -> Option<u32> {
    (1..=5).find(|code| mtu_bytes(*code) == Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_read_both_ways() {
        assert_eq!(
            (1..=5).map(mtu_bytes).collect::<Option<Vec<_>>>(),
            Some(vec![256, 512, 1024, 2048, 4096])
        );
        assert_eq!([mtu_bytes(0), mtu_bytes(6), mtu_code(1500)], [None; 3]);
        assert_eq!(mtu_code(4096), Some(5));
    }

    #[test]
    fn statuses_have_the_names_of_the_headers() {
        assert_eq!(Status::RETRY_EXCEEDED.to_string(), "RETRY_EXC_ERR");
        assert_eq!(Status::FLUSHED.to_string(), "WR_FLUSH_ERR");
        assert_eq!(Status::REMOTE_ACCESS.to_string(), "REM_ACCESS_ERR");
        assert_eq!(Status::RESPONSE_TIMEOUT.to_string(), "RESP_TIMEOUT_ERR");
        assert_eq!(Status(99).to_string(), "a status of a newer library");
    }
}
