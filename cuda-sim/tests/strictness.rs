//! What the stand-in is for beyond the transcript: it makes mistakes visible, and faults happen on demand.

mod stand_in;

use stand_in::Host;
use std::collections::BTreeSet;

#[test]
fn streams_without_an_event_between_them_run_in_either_order_by_the_seed() {
    let said: BTreeSet<String> = (0..16)
        .map(|seed| Host::new().with("SEED", &seed.to_string()).answer("sim-race-two-streams"))
        .collect();
    assert_eq!(said, ["byte=01".to_owned(), "byte=02".to_owned()].into());
}

#[test]
fn pinned_memory_read_before_the_copy_was_waited_for_is_stale() {
    let host = Host::new().with("LATE_US", "50000");
    for seed in 0..3 {
        let host = Host::new().with("SEED", &seed.to_string()).with("LATE_US", "50000");
        assert_eq!(host.answer("sim-race-pinned-read"), "byte=00");
    }
    assert_eq!(host.answer("copy-pinned-late"), "query=NOT_READY early=00 late=71 query=SUCCESS");
}

#[test]
fn a_function_that_flashboot_does_not_use_aborts() {
    assert_eq!(Host::new().answer("sim-unused-function"), "killed by signal 6");
}

#[test]
fn the_host_cannot_follow_a_device_pointer() {
    assert_eq!(Host::new().answer("sim-follow-device-pointer"), "killed by signal 11");
}

#[test]
fn a_destroyed_event_aborts() {
    assert_eq!(Host::new().answer("sim-destroyed-event"), "killed by signal 6");
}

#[test]
fn the_nth_call_of_a_function_fails_with_the_code_asked_for() {
    let host = Host::new().with("FAULTS", "cuMemCreate:2:OUT_OF_MEMORY,cuMemCreate:3:NOT_PERMITTED");
    assert_eq!(host.answer("sim-second-create"), "first=SUCCESS second=OUT_OF_MEMORY third=NOT_PERMITTED");
    let host = Host::new().with("FAULTS", "cuMemImportFromShareableHandle:*:INVALID_HANDLE");
    assert_eq!(host.answer("import-own-twice").split(' ').next(), Some("first=INVALID_HANDLE"));
    assert_eq!(
        Host::new().with("FAULTS", "cuInit:1:999").answer("init-twice"),
        "first=UNKNOWN second=SUCCESS"
    );
}

#[test]
fn a_poisoned_process_stays_poisoned() {
    let said = Host::new().with("FAULTS", "poison:after=10").answer("sim-many-calls");
    assert_eq!(
        said,
        "info=SUCCESS-then-NVLINK_UNCORRECTABLE retain=NVLINK_UNCORRECTABLE other-device=SUCCESS push=SUCCESS \
         other-info=NVLINK_UNCORRECTABLE"
    );
}

#[test]
fn a_device_that_dies_takes_its_contexts_and_leaves_the_others() {
    let said = Host::new().with("FAULTS", "die:device=0:after=10").answer("sim-many-calls");
    assert_eq!(
        said,
        "info=SUCCESS-then-LAUNCH_FAILED retain=DEVICE_UNAVAILABLE other-device=SUCCESS push=SUCCESS \
         other-info=SUCCESS"
    );
}

/// Whatever was under way: nothing of a dead device is pending, and nothing aborts.
#[test]
fn teardown_on_a_device_that_died_under_its_copies_is_errors_and_no_abort() {
    for (seed, late) in [("0", "0"), ("1", "500"), ("2", "20000"), ("3", "200000")] {
        let host = Host::new().with("SEED", seed).with("LATE_US", late);
        let said = host.with("FAULTS", "die:device=0:after=120").answer("sim-dies-under-pending-copies");
        assert_eq!(
            said,
            "sync=LAUNCH_FAILED event=LAUNCH_FAILED copy=LAUNCH_FAILED unmap-and-release=LAUNCH_FAILED \
             stream-destroy=LAUNCH_FAILED host-free=LAUNCH_FAILED pop=SUCCESS primary-release=SUCCESS",
            "seed {seed}, {late} us late"
        );
    }
}

#[test]
fn who_copies_from_a_device_that_died_loses_its_own_context() {
    let said = Host::new().with("FAULTS", "die:device=1:after=60").answer("sim-peer-dies");
    assert_eq!(
        said,
        "early-copy=SUCCESS early-sync=SUCCESS info=SUCCESS late-copy=SUCCESS late-sync=NVLINK_UNCORRECTABLE \
         info-after=NVLINK_UNCORRECTABLE unmap-own=SUCCESS unmap-peers=LAUNCH_FAILED"
    );
}

#[test]
fn a_context_is_poisoned_on_the_device_asked_for_and_no_other() {
    let host = Host::new().with("FAULTS", "poison:device=1:after=10:CONTAINED");
    assert!(host.answer("sim-many-calls").starts_with("info=SUCCESS retain=SUCCESS other-device=SUCCESS"));
    let host = Host::new().with("FAULTS", "poison:device=0:after=10:CONTAINED");
    assert!(host.answer("sim-many-calls").starts_with("info=SUCCESS-then-CONTAINED retain=CONTAINED"));
}

#[test]
fn memory_limits_hold_over_processes() {
    // The peer's 1 GiB and a little are too much for the device, and its 64 MiB are not.
    let host = Host::new().with("MEM", "512MiB");
    assert!(host.answer("accounting-exporter-killed").contains("OUT_OF_MEMORY"));
    assert_eq!(host.answer("accounting-import"), "imported=0 released=0");
}

#[test]
fn without_peer_access_a_device_does_not_reach_another() {
    let host = Host::new().with("P2P", "none");
    assert_eq!(host.answer("peer-two"), "call=SUCCESS can=0");
    assert_eq!(host.answer("copy-between-devices"), "setup access=INVALID_DEVICE");
    let host = host.with_imex();
    let said = "descriptor=INVALID_DEVICE own=SUCCESS fabric=INVALID_DEVICE own=SUCCESS";
    assert_eq!(host.answer("sim-fabric-of-another-device"), said);
    let said = "descriptor=SUCCESS own=SUCCESS fabric=SUCCESS own=SUCCESS";
    assert_eq!(Host::new().with_imex().answer("sim-fabric-of-another-device"), said);
}

#[test]
fn the_simulated_host_is_what_its_variables_say() {
    let host = Host::new().with("MIG", "1").with("DRIVER_VERSION", "12010");
    assert_eq!(host.answer("sim-name-and-version"), "version=12010 name=flashboot_cuda-sim_MIG_1g.18gb");
    let host = Host::new().with("NO_KERNEL", "1").with("DEVICES", "1");
    assert_eq!(host.answer("hash-whole"), "setup module=NO_BINARY_FOR_GPU");
    assert_eq!(host.answer("peer-two"), "skipped: needs two devices");
    assert_eq!(Host::new().with("DEVICES", "0").answer("init-twice"), "first=NO_DEVICE second=NO_DEVICE");
}

#[test]
fn a_variable_that_cannot_be_read_is_loud() {
    assert_eq!(Host::new().with("FAULTS", "cuMemCreate:soon:1").answer("init-twice"), "killed by signal 6");
    assert_eq!(Host::new().with("MEM", "much").answer("init-twice"), "killed by signal 6");
}

/// By the documentation, **never asked of hardware** when this was written.
#[test]
fn memory_that_may_only_be_read_is_registered_for_reading_and_not_written() {
    let said = Host::new().answer("sim-register-for-reading");
    let wanted = "can=1 plain=INVALID_VALUE for-reading=SUCCESS h2d=SUCCESS sync=SUCCESS byte=5a d2h=INVALID_VALUE \
                  unregister=SUCCESS";
    assert_eq!(said, wanted);
    let said = Host::new().with("NO_READ_ONLY_REGISTER", "1").answer("sim-register-for-reading");
    assert_eq!(said, "can=0 plain=INVALID_VALUE for-reading=NOT_SUPPORTED");
}
