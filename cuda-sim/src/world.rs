//! The process's one driver: its state, and what every call passes before it is answered.

use crate::{
    abi::code,
    config::{Config, Fault},
    context::Contexts,
    device::{self, Device},
    host::Host,
    kernel::Modules,
    nic::NicWrites,
    pinned::Pins,
    stream::Streams,
    vmm::Vmm,
    work::{Action, Work},
};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    env,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Everything after `cuInit`.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: &'static Config,
    pub(crate) host: Host,
    pub(crate) devices: Vec<Device>,
    process: i32,
    state: Mutex<State>,
    /// Told whenever work was queued or done.
    pub(crate) changed: Condvar,
}

/// What calls change.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) contexts: Contexts,
    pub(crate) vmm: Vmm,
    pub(crate) streams: Streams,
    pub(crate) pins: Pins,
    pub(crate) modules: Modules,
    pub(crate) nic_writes: NicWrites,
}

static WORLD: OnceLock<World> = OnceLock::new();
static CALLS: Mutex<Calls> = Mutex::new(Calls { total: 0, by_function: BTreeMap::new() });

struct Calls {
    total: u64,
    by_function: BTreeMap<&'static str, u64>,
}

thread_local! {
    /// This thread's stack of current contexts, as ordinals.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(Config::read)
}

/// A name for an object that no other object of this process ever had.
pub(crate) fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x5000_0000);
    NEXT.fetch_add(64, Ordering::Relaxed)
}

/// Whether such a name was ever given.
pub(crate) fn was_given(name: u64) -> bool {
    let end = fresh();
    (0x5000_0000..end).contains(&name) && name.is_multiple_of(64)
}

fn process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Counts a call and gives the fault that is due, if one is.
fn due(function: &'static str) -> Result<(), u32> {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.total += 1;
    let total = calls.total;
    let count = calls.by_function.entry(function).or_default();
    *count += 1;
    let count = *count;
    drop(calls);
    for (number, fault) in config().faults.iter().enumerate() {
        let (fault, once) = match fault {
            Fault::Once(fault) => (&**fault, true),
            fault => (fault, false),
        };
        let is_due = match fault {
            Fault::Call { function: named, nth, .. } => {
                named == function && nth.is_none_or(|nth| nth == count)
            }
            Fault::Poison { after, .. } | Fault::Die { after, .. } => total > *after,
            Fault::Once(_) => false,
        };
        if !is_due || once && !claims(number, fault) {
            continue;
        }
        match fault {
            Fault::Call { code, .. } => return Err(*code),
            Fault::Poison { device, code, .. } => {
                if let Some(world) = WORLD.get() {
                    world.poison(*device, *code);
                }
            }
            Fault::Die { device, .. } => {
                if let Some(world) = WORLD.get() {
                    world.kill(*device);
                }
            }
            Fault::Once(_) => {}
        }
    }
    Ok(())
}

/// Whether this process is the one of the host that the fault with this number strikes once: the first that it can strike, as a
/// file says that all of them share.
fn claims(number: usize, fault: &Fault) -> bool {
    static CLAIMED: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    if let Fault::Poison { device, .. } = fault
        && !WORLD.get().is_some_and(|world| world.has_context(*device))
    {
        return false;
    }
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    *claimed.entry(number).or_insert_with(|| {
        let file = config().dir.join(format!("once-{number}"));
        std::fs::File::options().write(true).create_new(true).open(file).is_ok()
    })
}

/// Answers a call that needs no initialisation.
pub(crate) fn answer_before_init(
    function: &'static str,
    body: impl FnOnce(&'static Config) -> Result<(), u32>,
) -> u32 {
    match due(function).and_then(|()| body(config())) {
        Ok(()) => code::SUCCESS,
        Err(code) => code,
    }
}

/// Answers a call.
pub(crate) fn answer(function: &'static str, body: impl FnOnce(&'static World) -> Result<(), u32>) -> u32 {
    let Some(world) = WORLD.get() else { return code::NOT_INITIALIZED };
    // Row `fork-after-init`. Before anything that another thread of the parent may have locked.
    if world.process != process() {
        return code::NOT_INITIALIZED;
    }
    match due(function).and_then(|()| body(world)) {
        Ok(()) => code::SUCCESS,
        Err(code) => code,
    }
}

/// `cuInit`.
pub(crate) fn init(flags: u32) -> u32 {
    if WORLD.get().is_some_and(|world| world.process != process()) {
        return code::NOT_INITIALIZED;
    }
    answer_before_init("cuInit", |config| {
        // Row `init-flags`.
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let host = Host::open(&config.dir, config.devices, config.memory);
        let variable = env::var("CUDA_VISIBLE_DEVICES").ok();
        let devices = device::visible(&host, config, variable.as_deref())?;
        WORLD.get_or_init(|| World {
            config,
            host,
            state: Mutex::new(State { contexts: Contexts::new(devices.len()), ..State::default() }),
            devices,
            process: process(),
            changed: Condvar::new(),
        });
        Ok(())
    })
}

impl World {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, once nothing of a poisoned context is being done any more: for calls that take away what work may
    /// touch. Dead work is never pending.
    pub(crate) fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        while state.streams.is_dying() {
            state = self.wait(state);
        }
        state
    }

    /// Waits until something changed.
    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// A device by its ordinal (row `device-out-of-range`).
    pub(crate) fn device(&self, ordinal: i32) -> Result<(usize, &Device), u32> {
        let index = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        Ok((index, self.devices.get(index).ok_or(code::INVALID_DEVICE)?))
    }

    /// The ordinal of the context current on this thread (rows `no-context`, `context-per-thread`,
    /// `primary-released-then-used`, `poison-every-call`).
    pub(crate) fn current(&self) -> Result<usize, u32> {
        let top = CURRENT.with_borrow(|stack| stack.last().copied()).ok_or(code::INVALID_CONTEXT)?;
        self.state().contexts.usable(top)?;
        Ok(top)
    }

    /// Whether a context is retained; of that device of the host, where one is said.
    fn has_context(&self, physical: Option<usize>) -> bool {
        self.state().contexts.active().into_iter().any(|ordinal| {
            let device = self.devices.get(ordinal).map(|device| device.physical);
            physical.is_none() || physical == device
        })
    }

    /// The contexts that are retained, or the one of that device of the host, are beyond use.
    fn poison(&self, physical: Option<usize>, code: u32) {
        let mut state = self.state();
        for ordinal in state.contexts.active() {
            let device = self.devices.get(ordinal).map(|device| device.physical);
            if physical.is_none() || physical == device {
                state.poison(ordinal, code);
            }
        }
        self.changed.notify_all();
    }

    /// The device is gone: its contexts are beyond use, and so is its memory, for whoever has it mapped. Never run on
    /// hardware.
    fn kill(&self, physical: usize) {
        let mut state = self.state();
        state.vmm.lose(physical);
        for (ordinal, device) in self.devices.iter().enumerate() {
            if device.physical == physical {
                state.contexts.kill(ordinal);
                state.poison(ordinal, code::LAUNCH_FAILED);
            }
        }
        self.changed.notify_all();
    }
}

/// Makes a context current on this thread.
pub(crate) fn push(ordinal: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(ordinal));
}

/// Takes the current one off (row `pop-empty`).
pub(crate) fn pop() -> Result<usize, u32> {
    CURRENT.with_borrow_mut(Vec::pop).ok_or(code::INVALID_CONTEXT)
}

impl State {
    /// A context is beyond use: what it had queued never runs.
    pub(crate) fn poison(&mut self, ordinal: usize, code: u32) {
        if self.contexts.poison(ordinal, code) {
            self.streams.abandon(ordinal, code);
        }
    }

    /// Queues work. What touches memory of a device that is gone fails as over a link that broke. Never run on
    /// hardware.
    pub(crate) fn submit(
        &mut self,
        world: &'static World,
        context: usize,
        stream: u64,
        mut work: Work,
    ) -> Result<Arc<Work>, u32> {
        if self.vmm.is_lost(&work.touches) {
            work.action = Action::Fault(code::NVLINK_UNCORRECTABLE);
        }
        self.streams.submit(world, context, stream, work)
    }
}
