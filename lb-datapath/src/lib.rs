//! All access to the kernel: maps, programs, pins, devices.
//!
//! ```text
//! Datapath::open ─ maps (pinned) ──── ServiceMaps: contents(), apply()      the one writer
//!                │                    Conntrack: list(), expire(), purge()  independent of the writer
//!                └ programs (pinned)  Attacher: sync(devices)               independent, driven by DeviceWatcher
//! ```
//!
//! Pinned maps, programs and links work without the agent. A new agent reuses the maps after checking their shape, and
//! replaces the programs on each device in one step.
//!
//! Each folder imports only from folders on lower lines of this list, with two exceptions: the options in `bpf` contain
//! devices of `net`, and the cleanup in `attach` uses the filter of `state`.
//!
//! ```text
//! datapath   the data plane opened for writing         inspect   read access for commands, without a lock
//! state      the maps, as typed tables
//! attach     programs on devices and control groups
//! net        devices, addresses, routes, ports
//! bpf        system calls, pins, the object and its loader
//! ```

mod attach;
mod bpf;
mod datapath;
mod error;
mod inspect;
mod net;
mod state;

/// A name of a device, or a glob that matches names.
pub use glob::Pattern as DevicePattern;

pub use self::{
    attach::{
        announcer::AnnounceAttacher,
        attacher::{AttachPoint, Attacher, SyncReport},
        cleanup::{Removed, cleanup},
        direction::Direction,
        sockets::{SocketAttacher, SocketAttachment, cgroup_root},
        xdp::{XdpAttacher, XdpMode},
    },
    bpf::{
        anchor::{Anchor, Rescued},
        checksum::{link, linked_object},
        flow_events::FlowEvents,
        globals::Globals,
        grace,
        loader::{BpfLogger, OBJECT},
        options::{
            AttachMode, BpfLogLevel, Capacities, Forwarding, Options, SocketOptions, SocketScope, XdpOption,
        },
        table::Table,
        verify::{SLOWEST_TO_VERIFY, load_program},
    },
    datapath::Datapath,
    error::DatapathError,
    inspect::{
        check::{Probe, ProbeResult, check, degraded, forwards},
        missing::Missing,
        objects::{LinkObject, MapObject, Objects, ProgramObject},
        pinned::{Attachment, MapFill, Pinned, ProgramStatus, XdpAttachment, bypassed_policies},
        program_view::ProgramView,
        run_time::{RunTime, Work, work},
    },
    net::{
        announce_socket::AnnounceSocket,
        announced_routes::{AnnouncedRoutes, RouteUpdate},
        catch::{CATCH_DEVICE, CatchDevice},
        devices::{Device, DeviceKind, DevicePatterns, Layer, classify},
        network::{DefaultRoute, Link, LinkAddress, Network, arp_ignore, device_name, has_ipv4_address},
        our_routes::Range,
        ports::{DEFAULT_MASQUERADE_PORTS, PortReservation},
        route::{Route, Routes},
        unreachable::UnreachableRoutes,
        watch::{DeviceWatcher, detect_devices},
        xfrm::{OutPolicy, PolicyWatcher},
    },
    state::{
        active_flows::{ActiveFlows, Recount},
        affinity::{AffinityReport, AffinityTable},
        announcements::Announcements,
        conntrack::{Connection, Conntrack, FlowWalk, GcReport, Ledger, monotonic_nanoseconds},
        device_map::DeviceMap,
        dns_intercept::DnsIntercepts,
        filter::{Filter, FilterFill, FilterMemory},
        flow_table::{FlowTable, ReadEntry},
        key_set::{InternalDevices, PeerAddresses, UnansweredBackends},
        maps::{ApplyError, ServiceMaps},
        monitor::Monitor,
        node_sockets::{NodeSockets, ServiceConnection},
        settings::SettingsMap,
        stats::Stats,
    },
};
