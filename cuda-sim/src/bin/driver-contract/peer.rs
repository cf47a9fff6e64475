//! A second process of this program, told what to do over a socket that is its standard input.

use crate::{
    abi::{ACCESS_READ_WRITE, DevicePtr, FABRIC, Handle},
    driver::Driver,
    facts::{must, name},
    gpu::{GRANULE, Gpu},
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
    ptr,
};

/// One message: words, and perhaps a descriptor.
pub(crate) struct Channel(OwnedFd);

impl Channel {
    pub(crate) fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> Result<(), String> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(|e| format!("setup send={e}"))
    }

    pub(crate) fn receive(&self) -> Result<(String, Option<OwnedFd>), String> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 4096];
        let got = recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let got = got.map_err(|e| format!("setup receive={e}"))?;
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let text = bytes.get(..got.bytes).unwrap_or_default();
        Ok((String::from_utf8_lossy(text).into_owned(), fd))
    }
}

/// The second process; killed when dropped.
pub(crate) struct Peer {
    child: Child,
    channel: Channel,
}

impl Peer {
    /// Starts one with variables of its own.
    pub(crate) fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.map_err(|e| format!("setup socketpair={e}"))?;
        let child = Command::new("/proc/self/exe")
            .arg("--peer")
            .envs(variables.iter().copied())
            .stdin(Stdio::from(theirs))
            .spawn()
            .map_err(|e| format!("setup spawn={e}"))?;
        Ok(Self { child, channel: Channel(ours) })
    }

    /// Sends an order and gives the answer.
    pub(crate) fn ask(
        &self,
        order: &str,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(String, Option<OwnedFd>), String> {
        self.channel.send(order, fd)?;
        self.channel.receive()
    }

    /// Kills it as a crash would, and waits until it is gone.
    pub(crate) fn kill(mut self) -> Result<(), String> {
        self.child.kill().map_err(|e| e.to_string())?;
        self.child.wait().map(drop).map_err(|e| e.to_string())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Nothing to do about a peer that is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The second process: orders in, answers out, until the socket closes.
pub(crate) fn serve(driver: &Driver) -> Result<(), String> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
    let channel = Channel(stdin);
    let mut held = Held::default();
    loop {
        let (order, fd) = channel.receive()?;
        if order.is_empty() {
            return Ok(());
        }
        let mut answered = None;
        let text = held.obey(driver, &order, fd, &mut answered).unwrap_or_else(|e| e);
        channel.send(&text, answered.as_ref().map(OwnedFd::as_fd))?;
    }
}

#[derive(Default)]
struct Held {
    at: DevicePtr,
    size: usize,
    handle: Handle,
}

impl Held {
    fn obey(
        &mut self,
        driver: &Driver,
        order: &str,
        fd: Option<OwnedFd>,
        answer: &mut Option<OwnedFd>,
    ) -> Result<String, String> {
        let words: Vec<&str> = order.split(' ').collect();
        let gpu = Gpu(driver);
        Ok(match *words.as_slice() {
            // The devices it sees.
            ["uuids"] => match driver.init(0) {
                0 => {
                    let mut all = Vec::new();
                    for device in 0..driver.count()? {
                        let uuid = driver.uuid(device)?;
                        all.push(uuid.iter().map(|b| format!("{b:02x}")).collect::<String>());
                    }
                    all.join(" ")
                }
                failed => name(failed),
            },
            // Makes memory of this many granules filled with a byte, and sends its descriptor.
            ["export", granules, byte] => {
                driver.enter(0)?;
                let size = granules.parse::<usize>().map_err(|e| e.to_string())? * GRANULE;
                let made = gpu.mapped(size)?;
                gpu.fill(made, byte.parse().map_err(|_| "setup byte")?)?;
                *self = Self { at: made.at, size, handle: made.handle };
                *answer = Some(gpu.export(made.handle)?);
                "exported".into()
            }
            // Imports the descriptor and maps that many granules with these access flags.
            ["import", granules, flags] => {
                driver.enter(0)?;
                let fd = fd.ok_or("setup no descriptor")?;
                self.size = granules.parse::<usize>().map_err(|e| e.to_string())? * GRANULE;
                let imported = gpu.import(fd.as_fd(), &mut self.handle);
                if imported != 0 {
                    return Ok(format!("import={}", name(imported)));
                }
                self.at = gpu.range(self.size)?;
                let mapped = gpu.mem_map(self.at, self.size, 0, self.handle, 0);
                if mapped != 0 {
                    return Ok(format!("map={}", name(mapped)));
                }
                let flags = flags.parse().unwrap_or(ACCESS_READ_WRITE);
                format!("access={}", name(gpu.allow(self.at, self.size, 0, flags)))
            }
            // The same on the fabric; sends the handle in hexadecimal.
            ["fabric", granules, byte] => {
                driver.enter(0)?;
                let size = granules.parse::<usize>().map_err(|e| e.to_string())? * GRANULE;
                let handle = gpu.memory(size, FABRIC)?;
                let made = gpu.map(handle, size)?;
                gpu.fill(made, byte.parse().map_err(|_| "setup byte")?)?;
                let mut bytes = [0_u8; 64];
                must("export", gpu.mem_export(bytes.as_mut_ptr().cast(), handle, FABRIC, 0))?;
                let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
                format!("fabric={hex}")
            }
            // Its context becomes unusable.
            ["poison"] => name(crate::cases::break_context(&gpu)?.1),
            ["read"] => gpu.peek(self.at),
            ["write"] => {
                let set = gpu.memset(self.at, 0xEE, self.size, ptr::null_mut());
                let done = gpu.stream_synchronize(ptr::null_mut());
                format!("write={} sync={}", name(set), name(done))
            }
            ["release"] => {
                let unmapped = gpu.mem_unmap(self.at, self.size);
                let released = gpu.mem_release(self.handle);
                let freed = gpu.address_free(self.at, self.size);
                format!("unmap={} release={} free={}", name(unmapped), name(released), name(freed))
            }
            _ => return Err(format!("setup order {order:?}")),
        })
    }
}
