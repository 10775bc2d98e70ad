//! SCTP through a service, with the kernel's own sockets. The tests are skipped if the kernel has no SCTP; the Debian
//! kernels of `cargo xtask vm` have it.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use lb_tests::{
    client::PATIENCE,
    cluster::{CLIENT, ClientLink},
    manifests::{Port, Service},
    netns::Netns,
    patience, skip,
};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, listen,
        socket,
    },
};

use crate::bed::{Bed, vips};

/// The port of the service, and that of the pods.
const PORT: u16 = 3868;
const TARGET: u16 = 3869;
/// The pods that serve the port, on both nodes.
const PODS: [&str; 2] = ["pod2", "pod3"];

/// A one-to-one socket, which works like a TCP socket. It is bound to one address, so that it announces no further
/// addresses to its peer: the programs translate no addresses inside SCTP chunks.
fn bound_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, SockProtocol::Sctp)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(socket)
}

fn open(netns: &Netns, from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let stream = netns.run(|| {
        let socket = bound_socket(SocketAddr::new(from, 0))?;
        connect(socket.as_raw_fd(), &SockaddrStorage::from(to))?;
        Ok(TcpStream::from(socket))
    })?;
    stream.set_read_timeout(Some(PATIENCE * patience()))?;
    Ok(stream)
}

/// Answers each message with the server's name and the address from which the association came, until the test ends.
fn serve(netns: &Netns, name: &'static str, address: IpAddr) {
    let listener = netns.run(|| {
        let socket = bound_socket(SocketAddr::new(address, TARGET))?;
        listen(&socket, Backlog::new(16)?)?;
        Ok(TcpListener::from(socket))
    });
    let listener = listener.unwrap();
    thread::spawn(move || {
        while let Ok((mut stream, seen)) = listener.accept() {
            let mut message = [0; 64];
            while let Ok(1..) = stream.read(&mut message) {
                if stream.write_all(format!("{name} {seen}").as_bytes()).is_err() {
                    break;
                }
            }
        }
    });
}

fn ask(stream: &mut TcpStream) -> io::Result<(String, SocketAddr)> {
    stream.write_all(b"?")?;
    let mut answer = [0; 128];
    let length = stream.read(&mut answer)?;
    let text = String::from_utf8_lossy(&answer[..length]).into_owned();
    let (name, seen) = text.split_once(' ').ok_or_else(|| io::Error::other(text.clone()))?;
    Ok((name.to_owned(), seen.parse().map_err(io::Error::other)?))
}

#[test]
fn sctp_associations_reach_every_backend_and_stay_with_it() {
    let probe = bound_socket("127.0.0.1:0".parse().unwrap());
    if matches!(probe, Err(Errno::EPROTONOSUPPORT)) {
        skip::whole("this kernel has no SCTP");
        return;
    }
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    for name in PODS {
        let pod = bed.cluster.pod(name).unwrap();
        CLIENT.iter().for_each(|like| serve(&pod.netns, name, pod.address(*like)));
    }
    let port = Port { name: "diameter", protocol: "SCTP", port: PORT, target_port: TARGET, node_port: None };
    let service = Service {
        name: "sctp".to_owned(),
        cluster_ips: vips(12).to_vec(),
        ports: vec![port],
        endpoints: PODS.iter().map(|name| bed.cluster.pod(name).unwrap().endpoint()).collect(),
        ..Service::default()
    };
    bed.cluster.manifests.put(&service).unwrap();
    bed.start_agent();
    for (vip, from) in vips(12).into_iter().zip(CLIENT) {
        let mut answered = Vec::new();
        for _ in 0..32 {
            let mut stream = open(&bed.cluster.client, from, SocketAddr::new(vip, PORT)).unwrap();
            let (first, seen) = ask(&mut stream).unwrap();
            assert_eq!(seen, stream.local_addr().unwrap(), "{vip}: backends see the client's own address");
            for _ in 0..5 {
                thread::sleep(Duration::from_millis(1));
                assert_eq!(ask(&mut stream).unwrap().0, first, "{vip}: an association stays");
            }
            answered.push(first);
        }
        for name in PODS {
            assert!(
                answered.iter().any(|answer| answer == name),
                "{vip}: {name} got none of 32 associations"
            );
        }
    }
}
