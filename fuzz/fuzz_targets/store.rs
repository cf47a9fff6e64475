//! A store's record and its address: what is read is written as the same, and nothing panics.
#![no_main]

use flashboot_rendezvous::store::{Address, MAX_RECORD, Record};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = Record::decode(bytes) {
        assert!(bytes.len() <= MAX_RECORD);
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
    if let Ok(address) = str::from_utf8(bytes).unwrap_or_default().parse::<Address>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
});
