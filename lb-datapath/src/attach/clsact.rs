//! Programs as filters of the clsact qdisc, for kernels without tcx (before 6.6).
//!
//! Our filters are identified by handle and name. Filters of other software, and a qdisc that other software has
//! created, stay. Each map layout has its own handle: during an upgrade or downgrade both versions have filters, and
//! those of the agent that takes over run first.

use std::{
    fs, io,
    os::fd::AsRawFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use lb_common::LAYOUT_VERSION;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
};

use crate::{
    attach::direction::Direction,
    bpf::{
        bpffs::{self, Folder},
        program::LoadedProgram,
    },
    error::DatapathError,
    net::{netlink::Netlink, network},
};

/// What one of our filters does. A hook has at most one filter for each role and map layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Runs the programs that serve Services.
    Serve,
    /// Answers ARP requests and neighbour solicitations for announced addresses. This filter is normally created after
    /// that of [`Role::Serve`], with the same priority, so it runs first: the kernel runs such filters in reverse order
    /// of creation.
    Announce,
}

impl Role {
    /// Handle of our filters for this role. Major number: the layout version (agents with layouts up to 4 used 0).
    /// Minor number: "lb" or "la" in ASCII.
    #[expect(clippy::cast_possible_truncation, reason = "there will not be that many versions")]
    const fn handle(self) -> TcHandle {
        let minor = match self {
            Self::Serve => 0x6c62,
            Self::Announce => 0x6c61,
        };
        TcHandle { major: LAYOUT_VERSION as u16, minor }
    }
}

/// The kind of the qdisc.
const CLSACT: &str = "clsact";
/// Start of the names of our filters; the program's name follows.
const NAME_PREFIX: &str = "lb:";
/// `ETH_P_ALL`, in network byte order as filters have it.
const ALL_PROTOCOLS: u32 = 0x0003_u16.to_be() as u32;
/// Number of priorities to try, because filters of other software may occupy some.
const PRIORITIES: u16 = 16;

/// One of our filters on a hook, as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) program_id: u32,
    priority: u16,
    handle: TcHandle,
}

impl Filter {
    fn is_of_this_layout(&self) -> bool {
        self.handle.major == Role::Serve.handle().major
    }
}

impl Direction {
    fn parent(self) -> TcHandle {
        let minor = match self {
            Self::Ingress => TcHandle::MIN_INGRESS,
            Self::Egress => TcHandle::MIN_EGRESS,
        };
        TcHandle { major: TcHandle::CLSACT.major, minor }
    }

    /// Priorities to try one after the other, so that our program runs first at ingress and last at egress.
    fn priorities(self) -> Box<dyn Iterator<Item = u16>> {
        match self {
            Self::Ingress => Box::new(1..=PRIORITIES),
            Self::Egress => Box::new((u16::MAX - PRIORITIES..u16::MAX).rev()),
        }
    }
}

/// Our filter for `role` on a hook, of this agent's map layout; `None` if there is none.
pub(crate) fn find(
    netlink: &mut Netlink,
    (ifindex, direction, role): (u32, Direction, Role),
) -> io::Result<Option<Filter>> {
    let filters = find_all(netlink, ifindex, direction)?;
    Ok(filters.into_iter().find(|filter| filter.handle == role.handle()))
}

/// Our filters on a hook, with any map layout.
fn find_all(netlink: &mut Netlink, ifindex: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let request = RouteNetlinkMessage::GetTrafficFilter(message(ifindex, direction.parent())?);
    Ok(netlink.dump(&request)?.iter().filter_map(our_filter).collect())
}

fn our_filter(answer: &RouteNetlinkMessage) -> Option<Filter> {
    let RouteNetlinkMessage::NewTrafficFilter(TcMessage { header, attributes, .. }) = answer else {
        return None;
    };
    let options = attributes.iter().find_map(|attribute| {
        if let TcAttribute::Options(options) = attribute { Some(options) } else { None }
    })?;
    let (mut ours, mut program_id) = (false, None);
    for option in options {
        if let TcOption::Bpf(TcFilterBpfOption::ProgName(name)) = option {
            ours = name.starts_with(NAME_PREFIX);
        } else if let TcOption::Bpf(TcFilterBpfOption::ProgId(id)) = option {
            program_id = Some(*id);
        }
    }
    let priority = u16::try_from(header.info >> 16).ok()?;
    let handle = header.handle;
    let has_our_handle = [Role::Serve, Role::Announce].iter().any(|role| role.handle().minor == handle.minor);
    (ours && has_our_handle).then_some(Filter { program_id: program_id?, priority, handle })
}

/// Makes sure that our filter runs `program`: creates the filter, or replaces its program atomically. Creates the
/// clsact qdisc if there is none. Returns whether anything changed.
///
/// # Errors
/// Among others, the device has another qdisc in the place of clsact: [`other_qdisc`].
pub(crate) fn ensure(
    netlink: &mut Netlink,
    folder: &Folder,
    (ifindex, direction, role): (u32, Direction, Role),
    program: &LoadedProgram,
) -> Result<bool, DatapathError> {
    let failed = |error| DatapathError::Attach {
        action: "attach a program to",
        hook: format!("clsact {}", direction.as_str()),
        device: format!("device {ifindex}"),
        source: error,
    };
    if let Some(kind) = other_qdisc(netlink, ifindex).map_err(failed)? {
        return Err(failed(io::Error::other(format!(
            "other software has put a qdisc of kind {kind} in the place of clsact, which has no egress: let that \
             software shape traffic in another way, or remove the qdisc"
        ))));
    }
    if let Some(existing) = find(netlink, (ifindex, direction, role)).map_err(failed)? {
        let stale = existing.program_id != program.id;
        if stale {
            let place = (ifindex, direction, role);
            put_filter(netlink, place, program, existing.priority).map_err(failed)?;
        }
        return Ok(stale);
    }
    // Until the filter is there, another task could take the qdisc for unused and remove it.
    let _lock = lock_qdiscs();
    make_marked_qdisc(netlink, folder, ifindex, failed)?;
    let mut result = Ok(());
    for priority in direction.priorities() {
        result = put_filter(netlink, (ifindex, direction, role), program, priority);
        match &result {
            // A filter of another kind or for another protocol occupies this priority.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Ok(()) | Err(_) => break,
        }
    }
    result.map(|()| true).map_err(failed)
}

fn put_filter(
    netlink: &mut Netlink,
    (ifindex, direction, role): (u32, Direction, Role),
    program: &LoadedProgram,
    priority: u16,
) -> io::Result<()> {
    let mut message = filter(ifindex, direction, priority, role.handle())?;
    message.attributes.push(TcAttribute::Options(vec![
        TcOption::Bpf(TcFilterBpfOption::ProgFd(program.fd().as_raw_fd().cast_unsigned())),
        TcOption::Bpf(TcFilterBpfOption::ProgName(format!("{NAME_PREFIX}{}", program.name))),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    netlink.execute(RouteNetlinkMessage::NewTrafficFilter(message), NLM_F_CREATE)
}

/// Held while a qdisc is created, marked and given its first filter, and while a qdisc and its mark are removed: the
/// task that attaches programs and the task that announces addresses may work on one device at the same time.
static QDISCS: Mutex<()> = Mutex::new(());

fn lock_qdiscs() -> MutexGuard<'static, ()> {
    QDISCS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates the clsact qdisc of a device if it has none, and the mark that the qdisc is ours. Creates the mark first, so
/// that each qdisc of ours has a mark even if the agent dies in between. The caller holds the lock of qdiscs.
fn make_marked_qdisc(
    netlink: &mut Netlink,
    folder: &Folder,
    ifindex: u32,
    failed: impl FnOnce(io::Error) -> DatapathError,
) -> Result<(), DatapathError> {
    let mark = folder.clsact().join(ifindex.to_string());
    let is_marked = mark.exists();
    fs::create_dir_all(&mark).map_err(|error| DatapathError::file("create", &mark, error))?;
    let made = make_qdisc(netlink, ifindex);
    if !is_marked && !matches!(made, Ok(true)) {
        fs::remove_dir(&mark).map_err(|error| DatapathError::file("remove", &mark, error))?;
    }
    made.map(drop).map_err(failed)
}

/// Creates the clsact qdisc of a device. Returns false if the device had one.
fn make_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<bool> {
    let request = RouteNetlinkMessage::NewQueueDiscipline(qdisc(ifindex)?);
    match netlink.execute(request, NLM_F_CREATE | NLM_F_EXCL) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// The kind of the qdisc that a device has in the place of clsact; `None` if that qdisc is clsact, or if there is none.
/// The qdisc `ingress`, to which the CNI plugin `bandwidth` attaches filters, has the same handle, and accepts filters
/// for egress as well, but runs them at ingress (`ingress_tcf_block` of `net/sched/sch_ingress.c`).
fn other_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<Option<String>> {
    let request = RouteNetlinkMessage::GetQueueDiscipline(message(ifindex, TcHandle::CLSACT)?);
    let answers = match netlink.get(request) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        answers => answers?,
    };
    let mut kinds = answers.into_iter().filter_map(|answer| {
        let RouteNetlinkMessage::NewQueueDiscipline(qdisc) = answer else { return None };
        let kind = |attribute| if let TcAttribute::Kind(kind) = attribute { Some(kind) } else { None };
        qdisc.attributes.into_iter().find_map(kind)
    });
    Ok(kinds.find(|kind| kind != CLSACT))
}

/// Removes our filter of this agent's map layout. Returns false if there is none; the device may be gone.
pub(crate) fn remove(
    netlink: &mut Netlink,
    (ifindex, direction, role): (u32, Direction, Role),
) -> Result<bool, DatapathError> {
    let removed = find(netlink, (ifindex, direction, role)).and_then(|filter| {
        let Some(filter) = filter else { return Ok(false) };
        remove_filter(netlink, ifindex, direction, filter).map(|()| true)
    });
    removed
        .or_else(none_if_gone)
        .map_err(|error| DatapathError::netlink(format!("remove the filter of device {ifindex}"), error))
}

fn remove_filter(netlink: &mut Netlink, ifindex: u32, direction: Direction, it: Filter) -> io::Result<()> {
    let message = filter(ifindex, direction, it.priority, it.handle)?;
    netlink.execute(RouteNetlinkMessage::DelTrafficFilter(message), 0)
}

/// Removes our filters with other map layouts from all devices, and the qdiscs that agents have created and that have
/// no filters now.
pub(crate) fn remove_earlier(folder: &Folder) -> Result<(), DatapathError> {
    remove_from_all(|filter| !filter.is_of_this_layout())?;
    release_qdiscs(folder)
}

/// Removes our filters with any map layout from all devices; returns their number.
pub(crate) fn remove_everywhere() -> Result<usize, DatapathError> {
    remove_from_all(|_| true)
}

fn remove_from_all(which: impl Fn(&Filter) -> bool) -> Result<usize, DatapathError> {
    let mut netlink = open_netlink()?;
    let devices =
        network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
    let mut removed = 0;
    for index in devices.into_keys() {
        for direction in Direction::BOTH {
            let filters = find_all(&mut netlink, index, direction).or_else(none_if_gone);
            let result = filters.and_then(|filters| {
                let mut ours = filters.into_iter().filter(&which);
                ours.try_for_each(|filter| {
                    removed += 1;
                    remove_filter(&mut netlink, index, direction, filter)
                })
            });
            result.or_else(none_if_gone).map_err(|error| {
                DatapathError::netlink(format!("remove filters of device {index}"), error)
            })?;
        }
    }
    Ok(removed)
}

fn open_netlink() -> Result<Netlink, DatapathError> {
    Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))
}

fn none_if_gone<T: Default>(error: io::Error) -> io::Result<T> {
    if is_gone(&error) { Ok(T::default()) } else { Err(error) }
}

/// Calls [`release_qdisc`] for each device whose clsact qdisc an agent has created.
pub(crate) fn release_qdiscs(folder: &Folder) -> Result<(), DatapathError> {
    let mut netlink = open_netlink()?;
    marked(&folder.clsact())?.into_iter().try_for_each(|index| release_qdisc(&mut netlink, folder, index))
}

/// Removes the clsact qdisc of a device, if an agent has created the qdisc and it has no filters. Does nothing while
/// the qdisc has filters of ours with any map layout: during an upgrade, the filters of the earlier agent are removed
/// last. Once no filter of ours is left, removes the mark that an agent has created the qdisc, even if filters of other
/// software are left.
pub(crate) fn release_qdisc(
    netlink: &mut Netlink,
    folder: &Folder,
    ifindex: u32,
) -> Result<(), DatapathError> {
    let _lock = lock_qdiscs();
    let mark = folder.clsact().join(ifindex.to_string());
    if !mark.is_dir() {
        return Ok(());
    }
    let failed =
        |error| DatapathError::netlink(format!("remove the clsact qdisc of device {ifindex}"), error);
    let mut filters = Vec::new();
    let mut is_gone_already = false;
    for direction in Direction::BOTH {
        let request =
            RouteNetlinkMessage::GetTrafficFilter(message(ifindex, direction.parent()).map_err(failed)?);
        match netlink.dump(&request) {
            Ok(found) => filters.extend(found),
            Err(error) if is_gone(&error) => is_gone_already = true,
            Err(error) => return Err(failed(error)),
        }
    }
    if filters.iter().any(|filter| our_filter(filter).is_some()) {
        return Ok(());
    }
    if filters.is_empty() && !is_gone_already {
        let request = RouteNetlinkMessage::DelQueueDiscipline(qdisc(ifindex).map_err(failed)?);
        match netlink.execute(request, 0) {
            Err(error) if !is_gone(&error) => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
    }
    match fs::remove_dir(&mark) {
        // `lb-agent cleanup` may have removed the mark.
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DatapathError::file("remove", &mark, error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// The interface indices of the devices whose clsact qdisc an agent has created: the names of the subfolders of
/// `folder`.
pub(crate) fn marked(folder: &std::path::Path) -> Result<Vec<u32>, DatapathError> {
    let index = |path: std::path::PathBuf| path.file_name()?.to_str()?.parse().ok();
    Ok(bpffs::entries(folder)?.into_iter().filter_map(index).collect())
}

/// Whether the error may mean that there is no such device, qdisc or filter.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOENT | libc::EINVAL))
}

fn message(ifindex: u32, parent: TcHandle) -> io::Result<TcMessage> {
    let index = i32::try_from(ifindex).map_err(io::Error::other)?;
    let header = TcHeader { index, parent, ..TcHeader::default() };
    Ok(TcMessage::from_parts(header, Vec::new()))
}

fn filter(ifindex: u32, direction: Direction, priority: u16, handle: TcHandle) -> io::Result<TcMessage> {
    let mut message = message(ifindex, direction.parent())?;
    message.header.handle = handle;
    message.header.info = u32::from(priority) << 16 | ALL_PROTOCOLS;
    message.attributes.push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
    Ok(message)
}

fn qdisc(ifindex: u32) -> io::Result<TcMessage> {
    let mut message = message(ifindex, TcHandle::CLSACT)?;
    message.header.handle = TcHandle { major: TcHandle::CLSACT.major, minor: 0 };
    message.attributes.push(TcAttribute::Kind(CLSACT.to_owned()));
    Ok(message)
}
