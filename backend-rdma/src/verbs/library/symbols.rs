//! The library's functions by name, looked up once.

use super::NAME;
use crate::verbs::sys;
use flashboot_core::{Error, Kind, Result};
use libloading::os::unix::Library as Shared;
use std::ffi::{c_char, c_int, c_uint, c_void};

macro_rules! symbols {
    (
        required { $($field:ident = $symbol:literal: $signature:ty;)* }
        optional { $($maybe:ident = $name:literal: $kind:ty;)* }
    ) => {
        /// What is looked up, each with the signature that the headers give it.
        pub(super) struct Symbols {
            $(pub(super) $field: $signature,)*
            $(pub(super) $maybe: Option<$kind>,)*
        }

        impl Symbols {
            pub(super) fn find(library: &Shared) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the header's for this symbol.
                        let found = unsafe { library.get::<$signature>($symbol.as_bytes()) };
                        *found.map_err(|_| too_old($symbol))?
                    },)*
                    $($maybe: {
                        // SAFETY: as above.
                        let found = unsafe { library.get::<$kind>($name.as_bytes()) };
                        found.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

type Opaque = *mut c_void;

symbols! {
    required {
    device_list = "ibv_get_device_list": unsafe extern "C" fn(*mut c_int) -> *mut Opaque;
    free_list = "ibv_free_device_list": unsafe extern "C" fn(*mut Opaque);
    device_name = "ibv_get_device_name": unsafe extern "C" fn(Opaque) -> *const c_char;
    open_device = "ibv_open_device": unsafe extern "C" fn(Opaque) -> *mut sys::Context;
    close_device = "ibv_close_device": unsafe extern "C" fn(Opaque) -> c_int;
    query_device = "ibv_query_device": unsafe extern "C" fn(Opaque, *mut sys::DeviceAttr) -> c_int;
    query_port = "ibv_query_port": unsafe extern "C" fn(Opaque, u8, *mut sys::PortAttr) -> c_int;
    query_gid = "ibv_query_gid": unsafe extern "C" fn(Opaque, u8, c_int, *mut [u64; 2]) -> c_int;
    get_async_event = "ibv_get_async_event": unsafe extern "C" fn(Opaque, *mut sys::AsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event": unsafe extern "C" fn(*mut sys::AsyncEvent);
    alloc_pd = "ibv_alloc_pd": unsafe extern "C" fn(Opaque) -> Opaque;
    dealloc_pd = "ibv_dealloc_pd": unsafe extern "C" fn(Opaque) -> c_int;
    reg_mr = "ibv_reg_mr": unsafe extern "C" fn(Opaque, Opaque, usize, c_int) -> *mut sys::Mr;
    dereg_mr = "ibv_dereg_mr": unsafe extern "C" fn(Opaque) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": unsafe extern "C" fn(Opaque) -> *mut sys::CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel": unsafe extern "C" fn(Opaque) -> c_int;
    create_cq = "ibv_create_cq": unsafe extern "C" fn(Opaque, c_int, Opaque, Opaque, c_int) -> *mut sys::Cq;
    destroy_cq = "ibv_destroy_cq": unsafe extern "C" fn(Opaque) -> c_int;
    get_cq_event = "ibv_get_cq_event": unsafe extern "C" fn(Opaque, *mut Opaque, *mut Opaque) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": unsafe extern "C" fn(Opaque, c_uint);
    create_qp = "ibv_create_qp": unsafe extern "C" fn(Opaque, *mut sys::QpInitAttr) -> *mut sys::Qp;
    modify_qp = "ibv_modify_qp": unsafe extern "C" fn(Opaque, *mut sys::QpAttr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": unsafe extern "C" fn(Opaque) -> c_int;
    }
    optional {
    reg_dmabuf_mr = "ibv_reg_dmabuf_mr": unsafe extern "C" fn(Opaque, u64, usize, u64, c_int, c_int) -> *mut sys::Mr;
    query_gid_table = "_ibv_query_gid_table": unsafe extern "C" fn(Opaque, *mut sys::GidEntry, usize, u32, usize) -> isize;
    }
}

fn too_old(symbol: &str) -> Error {
    Error::new(Kind::Unavailable, "dlsym", format!("this machine's {NAME} has no {symbol}"))
        .with_remedy("install rdma-core 28 or later")
}
